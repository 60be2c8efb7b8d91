//! What stays open.

use super::*;

#[tokio::test]
async fn what_was_located_stays_open_until_too_much_is() {
    let controller = Failing::default().controller();
    let store = Store::new(controller.clone());
    let (dict, options) = (tssd_format::StateDict::new(), PutOptions::default());
    let keys: Vec<_> = (0..=MAX_OPENED).map(|it| Key::new(format!("{it:02}")).unwrap()).collect();
    for key in &keys {
        store.put_state_dict(key, &dict, &options).await.unwrap();
    }
    let locate = async |key| controller.locate(key, Selector::Newest).await.unwrap().lease;
    let first = locate(&keys[0]).await;
    for key in &keys[1..MAX_OPENED] {
        locate(key).await;
        assert!(Arc::ptr_eq(&first, &locate(&keys[0]).await), "it is still open");
    }
    locate(&keys[MAX_OPENED]).await;
    assert_eq!(controller.opened().located.len(), MAX_OPENED);
}

type Happening = Box<dyn FnOnce() + Send>;

/// A volume in which something happens while a blob is opened.
#[derive(Clone)]
struct Opening(MemoryVolume, Arc<Mutex<Option<Happening>>>);

impl Volume for Opening {
    fn reserve(
        &self,
        name: &str,
        len: u64,
        durability: Durability,
    ) -> Result<Box<dyn Reservation>> {
        self.0.reserve(name, len, durability)
    }

    fn open(&self, name: &str) -> Result<Option<Near>> {
        let opened = self.0.open(name);
        let happens = self.1.lock().unwrap().take();
        if let Some(happens) = happens {
            happens();
        }
        opened
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.0.delete(name)
    }

    fn list(&self, name: &str) -> Result<Vec<String>> {
        self.0.list(name)
    }

    fn route(&self) -> Route {
        self.0.route()
    }

    fn remove_folder(&self, name: &str) -> Result<()> {
        self.0.remove_folder(name)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_deleted_while_it_is_opened_does_not_stay_open() {
    let volume = Opening(MemoryVolume::default(), Arc::default());
    let ledgers = Arc::new(OwnedLedgers::default());
    let controller =
        LocalController::new(ledgers, Arc::new(volume.clone()), Arc::new(SystemEnvironment));
    let (store, key) = (Store::new(controller.clone()), Key::new("policy").unwrap());
    let (dict, other) = (tssd_format::StateDict::new(), Key::new("other").unwrap());
    for key in [&key, &other] {
        store.put_state_dict(key, &dict, &PutOptions::default()).await.unwrap();
    }
    let (deleting, deleted) = (controller.clone(), other.clone());
    let runtime = tokio::runtime::Handle::current();
    *volume.1.lock().unwrap() = Some(Box::new(move || {
        let count = runtime.block_on(deleting.delete(&deleted, Selection::All));
        assert_eq!(count.unwrap(), 1);
    }));
    controller.locate(&key, Selector::Newest).await.unwrap();
    assert!(controller.opened().located.is_empty(), "it may be what was deleted");
    controller.locate(&key, Selector::Newest).await.unwrap();
    assert!(controller.opened().located.contains_key(&key));
}
